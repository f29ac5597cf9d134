"""What experiments share: data, small models, one training loop, statistics."""
