function _bloomery_completion
    set --local token (commandline --current-token)
    # Of `--gpu=RTX` the value alone is completed, and fish wants the whole word.
    set --local prefix (string match --regex -- '^--[^=]+=' $token)
    for completion in (env _BLOOMERY_COMPLETE=fish_complete COMP_WORDS=(commandline --current-process --cut-at-cursor) COMP_CWORD=$token bloomery)
        set --local parts (string split --max 1 ',' -- $completion)
        switch $parts[1]
            case dir
                for path in (__fish_complete_directories $parts[2])
                    echo "$prefix$path"
                end
            case file
                for path in (__fish_complete_path $parts[2])
                    echo "$prefix$path"
                end
            case plain
                echo "$prefix$parts[2]"
        end
    end
end

complete --no-files --command bloomery --arguments "(_bloomery_completion)"
