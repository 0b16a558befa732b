"""The page: scenes, the HTML file, the live server, the notebook widget and the requests they answer."""
