"""The endpoint keeps the rules of its kind."""

from __future__ import annotations

from hello_endpoint.conformance import TestHello as TestHello
