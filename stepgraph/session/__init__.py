"""Sessions own what captures share; options, failures and messages that all engines use."""
