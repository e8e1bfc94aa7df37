"""A run read from OpenTelemetry spans of Megatron-LM."""
