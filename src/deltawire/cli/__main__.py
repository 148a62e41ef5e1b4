from deltawire.cli import main

main(prog_name="deltawire")
