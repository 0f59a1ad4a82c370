"""kvstore.retention"""
