from aswa_hf.cli import main

main()
