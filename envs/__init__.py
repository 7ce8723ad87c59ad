"""What is decided about: spaces, rewards, the search and its environments."""
