"""Static memory that graphs read and write: inputs, results, tensors lent to callers, and a pool that shares them."""
