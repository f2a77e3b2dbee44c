"""Decisions of WAR: standard library only, no I/O, no clock."""
