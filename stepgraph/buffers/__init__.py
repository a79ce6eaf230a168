"""Static memory around graphs: inputs, results, tensors lent to callers, and the pool that shares them."""
