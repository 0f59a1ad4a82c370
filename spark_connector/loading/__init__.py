"""DataFrames into a store: files that Spark builds, and one import that adds them.

Floors, from the top:

    sink        micro-batches of a stream
    load        a DataFrame as one import
    rows        columns chosen, rows in key order
    keys progress stage
"""
