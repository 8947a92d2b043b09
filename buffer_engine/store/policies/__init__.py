"""Read policies: which ready groups a batch takes, in constant time from an index that is made on first use."""
