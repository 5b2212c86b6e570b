"""Subcommands that need more than plugin metadata."""
