_bloomery_completion() {
    # bash makes words of `--gpu`, `=` and the value: the value alone is what the option takes.
    local words=() i
    for ((i = 0; i <= COMP_CWORD; i++)); do
        if [[ $i -gt 0 && ${COMP_WORDS[i]} == "=" && ${COMP_WORDS[i - 1]} == --* ]]; then
            [[ $i -eq $COMP_CWORD ]] && words+=("")
        else
            words+=("${COMP_WORDS[i]}")
        fi
    done

    local response type value
    response=$(COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) _BLOOMERY_COMPLETE=bash_complete "$1")
    while IFS=',' read -r type value; do
        case $type in
            dir)
                COMPREPLY=()
                compopt -o dirnames
                ;;
            file)
                COMPREPLY=()
                compopt -o default
                ;;
            plain)
                COMPREPLY+=("$value")
                # After a key or a folder more follows: no space.
                [[ $value == *[=/] ]] && compopt -o nospace
                ;;
        esac
    done <<< "$response"
    return 0
}

complete -o nosort -F _bloomery_completion bloomery
