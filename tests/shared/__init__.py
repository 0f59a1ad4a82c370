"""Stores that several processes have open, without a chosen owner."""
