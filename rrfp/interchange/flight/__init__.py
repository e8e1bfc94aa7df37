"""The dumps of torch's flight recorder, told as who waits for whom."""
