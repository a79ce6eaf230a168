"""Sessions own what captures share; all engines use the options, failures and messages here."""
