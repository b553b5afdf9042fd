"""Memory and time of a train step before it runs: compiled for a card, read from the executable, compared, chosen."""
