"""kvstore.timeline"""
