"""Other servers whose command lines `runtime translate` reads by tables: one file of data for each."""
