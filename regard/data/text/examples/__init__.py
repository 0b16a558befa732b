"""Files of examples: labeled and tagged texts, questions, documents."""
