"""kvstore.base"""
