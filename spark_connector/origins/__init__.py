"""Where Spark reads rows from: the directory of a store, or a backup collection.

Floors, from the top:

    opening                  from a place to its origin
    checkpoint collection    the two kinds of origin
    origin                   the contract
    place row_groups
"""
