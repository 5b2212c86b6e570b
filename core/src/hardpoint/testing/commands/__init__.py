"""Subcommands of ``hardpoint plugins`` for authors of plugins."""
