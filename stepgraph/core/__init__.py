"""What every room may use: errors and their catalogue, trees of arguments, frames, and facts about single tensors."""
