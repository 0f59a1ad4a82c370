"""The rules of the house, checked by `tests/test_layers.py`."""
