"""kvstore.remote"""
