"""DataFrames into a store: files that Spark builds, and one import that adds them.

Floors, from the top:

    push sink changes    micro-batches of a stream; the changes of another store
    load             a DataFrame as one import
    build writer     files built by tasks: by our sort, or from rows that Spark has sorted
    tables           the rows of a table
    rows             the rows of a load, in any order or sorted by key
    columns          the columns that a caller chooses
    keys progress results planned
"""
