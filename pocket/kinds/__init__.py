"""One module for each kind of exchange that pocket learns."""
