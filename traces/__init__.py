"""What was seen: records, trace files, fingerprints."""
