"""Raw data to tokenised dataset."""
