"""What several tests share: models, data, programs that ranks run, ways to start them."""
