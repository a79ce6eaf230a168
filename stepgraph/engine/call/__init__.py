"""Sessions own the memory and the stream that captures share. Here are also the options, errors and reports of all."""
