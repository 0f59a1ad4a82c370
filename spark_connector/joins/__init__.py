"""Joins of a DataFrame with the history of a store: labels move, history does not.

Floors, from the top:

    join          the two calls
    tasks         planning a join, and the work of a task
    latest        rows of a table with an event time
    table_rows    rows of a table
    answers       the columns that a join adds
"""
