"""Pushes: one job, many stores."""
