#compdef vmseal
# Completion of vmseal's command line in zsh.
_vmseal() {
    local -a answers open values others
    local answer
    answers=("${(@f)$(
        COMPLETE=zsh _CLAP_IFS=$'\n' _CLAP_COMPLETE_INDEX=$((CURRENT - 1)) vmseal -- "${words[@]}" 2> /dev/null
    )}")
    for answer in $answers; do
        # VALUE, or VALUE:HELP.
        case $answer in
            *[=/:] | *[=/]:*) open+=("$answer") ;;
            [^:]##=*) values+=("$answer") ;;
            *) others+=("$answer") ;;
        esac
    done
    local none=1
    # A key goes on with its value, a directory with what is in it, a network with what it becomes; a value may go on with a
    # comma and another key.
    (($#open)) && _describe -V values open -S '' && none=0
    (($#values)) && _describe -V values values -S ' ' -r ' ,' && none=0
    (($#others)) && _describe -V values others && none=0
    return none
}

# Found by its name, this file is the function itself; else it is sourced.
if [[ $funcstack[1] == _vmseal ]]; then
    _vmseal "$@"
else
    compdef _vmseal vmseal
fi
