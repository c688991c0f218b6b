"""Numbers by search: knobs and their space, what a compiler says of a configuration, and searches over measurements."""
