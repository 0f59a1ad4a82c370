"""New stores and collections whose versions carry the times of a DataFrame's rows.

Floors, from the top:

    seed               the call
    store collection   the two kinds of target
    rows               the chosen columns
"""
