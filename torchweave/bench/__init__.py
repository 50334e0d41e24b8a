"""What `torchweave bench` measures, how, and how it is written down."""
