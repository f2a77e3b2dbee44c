"""Decisions of a recorded run, made again and explained."""
