#compdef bloomery

_bloomery_completion() {
    local -a described plain unfinished response
    local type key descr option=''
    (( ! $+commands[bloomery] )) && return 1

    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) _BLOOMERY_COMPLETE=zsh_complete bloomery)}")

    # Of `--gpu=RTX` the value alone is completed.
    if [[ "$PREFIX" == --*=* ]]; then
        option="${PREFIX%%=*}="
    fi

    for type key descr in ${response}; do
        if [[ "$type" == "dir" ]]; then
            compset -P "$option"
            _path_files -/
        elif [[ "$type" == "file" ]]; then
            compset -P "$option"
            _path_files -f
        elif [[ "$type" == "plain" && "$key" == *[=/] ]]; then
            unfinished+=("$key")
        elif [[ "$type" == "plain" && "$descr" == "_" ]]; then
            plain+=("$key")
        elif [[ "$type" == "plain" ]]; then
            described+=("${key//:/\\:}:$descr")
        fi
    done

    if [[ -n "$described" ]]; then
        _describe -V unsorted described -U
    fi
    if [[ -n "$plain" ]]; then
        compadd -U -P "$option" -V unsorted -a plain
    fi
    # After a key or a folder more follows: no space.
    if [[ -n "$unfinished" ]]; then
        compadd -U -P "$option" -V unsorted -S '' -a unfinished
    fi
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    # autoload from fpath: this file is the function
    _bloomery_completion "$@"
else
    compdef _bloomery_completion bloomery
fi
