"""The words: what may be guessed, and what may be looked for. Their order is part of the game: seeds choose by it."""

WORDS: tuple[str, ...] = tuple(
    """
    about above adult after again agree album alive allow alone angle apple apply arrow award beach begin below bench
    birth blank block board brain brave bread brick bring brown brush build cable candy carry catch cause chain chair
    chart check cheer chief child class clean clear climb clock close cloth cloud coach coast couch count court cover
    crane cream crowd crown curve daily dance dream dress drink drive eagle early earth empty enjoy equal event exact
    extra fence field final flame float floor flour focus force frame fresh front fruit giant glass grape grass great
    green group guard guess guide happy heart honey horse hotel house human image inner juice knife large laugh learn
    lemon level light limit lunch metal model money month mouse music night noise north ocean offer order paint paper
    party peace phone piano plane plant plate point power press print queen quick quiet raise reach ready right river
    round score sheep sheet shirt sleep small smile sound south space sport stage start stone store storm story sugar
    sweet table teach think tiger today total touch tower track train truck trust uncle under value video visit voice
    watch water wheel white whole woman world write youth zebra
""".split()  # noqa: SIM905
)
