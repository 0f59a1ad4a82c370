"""Where Spark reads rows from: the directory of a store, a backup collection, or a server.

Floors, from the top:

    opening                  from a place to its origin
    checkpoint collection server    the kinds of origin
    origin                   the contract
    place row_groups
"""
