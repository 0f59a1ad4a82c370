"""Where Spark reads rows from: the directory of a store, or a backup collection."""
