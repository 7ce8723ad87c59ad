"""The decision problem: spaces, rewards, the search and its environments."""
