"""What is decided about: spaces, rewards and the environments, each of which registers its id when it is imported."""
