"""Our endpoints keep the contract of their kind, by the classes that ``hardpoint plugins test`` uses."""

from __future__ import annotations

from hardpoint_serving.conformance import TestAdmin as TestAdmin
from hardpoint_serving.conformance import TestClassify as TestClassify
from hardpoint_serving.conformance import TestEmbeddings as TestEmbeddings
from hardpoint_serving.conformance import TestKVEvents as TestKVEvents
from hardpoint_serving.conformance import TestOpenAI as TestOpenAI
from hardpoint_serving.conformance import TestOps as TestOps
from hardpoint_serving.conformance import TestPooling as TestPooling
from hardpoint_serving.conformance import TestProcess as TestProcess
from hardpoint_serving.conformance import TestScore as TestScore
