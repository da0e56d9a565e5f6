# Completion of vmseal's command line in bash.
#
# bash splits words at = and : too, and replaces only what follows the last of them. vmseal is asked about the words as
# they were typed; what bash leaves in place is taken off the answers.
_vmseal() {
    local typed=${COMP_LINE:0:COMP_POINT} words=() before= index word gap
    for ((index = 0; index <= COMP_CWORD; index++)); do
        gap=${typed%%[![:space:]]*}
        word=${COMP_WORDS[index]}
        if ((index == COMP_CWORD)); then
            # It ends at the cursor. A quote that is still open is not part of it.
            word=${typed#"$gap"}
            [[ $word != [\'\"]"$2" ]] || word=$2
        fi
        typed=${typed#*"$word"}
        if [[ -z $gap && ${#words[@]} -gt 1 && ($word =~ ^[=:@]+$ || $before =~ ^[=:@]+$) ]]; then
            words[-1]+=$word
        else
            words+=("$word")
        fi
        before=$word
    done

    mapfile -t COMPREPLY < <(
        COMPLETE=bash _CLAP_IFS=$'\n' _CLAP_COMPLETE_INDEX=$((${#words[@]} - 1)) vmseal -- "${words[@]}" 2> /dev/null
    )
    # A key goes on with its value, a directory with what is in it; a value may go on with a comma and another key.
    local value=${words[-1]#--*=}
    if [[ $value == *=* || ${COMPREPLY-} =~ [=/:]$ ]]; then
        compopt -o nospace 2> /dev/null
    fi
    local in_place=${words[-1]%"$2"}
    COMPREPLY=("${COMPREPLY[@]#"$in_place"}")
}
complete -o bashdefault -o nosort -F _vmseal vmseal
