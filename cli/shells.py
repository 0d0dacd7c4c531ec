"""What makes a shell ask for the words that may come next; ``complete.py`` answers."""

from enum import StrEnum


class Shell(StrEnum):
    """A shell that can ask."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


# Bash takes sft@2 for three words, so it is given the line as it stands, and told what it is to put behind its last @.
_BASH = r"""
_layerstore_completion() {
    local IFS=$'\n'
    COMPREPLY=( $(
        _LAYERSTORE_COMPLETE=bash _LAYERSTORE_LINE="${COMP_LINE:0:COMP_POINT}" \
            _LAYERSTORE_BREAKS="$COMP_WORDBREAKS" "$1" 2>/dev/null
    ) )
}
complete -o default -o nosort -F _layerstore_completion layerstore 2>/dev/null ||
    complete -o default -F _layerstore_completion layerstore
"""

_ZSH = r"""
#compdef layerstore
_layerstore() {
    local -a replies
    replies=( ${(f)"$(
        _LAYERSTORE_COMPLETE=zsh _LAYERSTORE_LINE="${(j: :)words[1,CURRENT]}" ${words[1]} 2>/dev/null
    )"} )
    if (( $#replies )); then compadd -V layerstore -a replies; else _files; fi
}
if [[ ${funcstack[1]} == _layerstore ]]; then _layerstore "$@"; else compdef _layerstore layerstore; fi
"""

_FISH = r"""
function __layerstore_complete
    set -lx _LAYERSTORE_COMPLETE fish
    set -lx _LAYERSTORE_LINE (commandline -cp)
    set -l replies (layerstore 2>/dev/null)
    if set -q replies[1]
        printf '%s\n' $replies
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command layerstore --no-files --keep-order --arguments '(__layerstore_complete)'
"""

_SCRIPTS = {Shell.BASH: _BASH, Shell.ZSH: _ZSH, Shell.FISH: _FISH}


def script_for(shell: Shell) -> str:
    """Return what *shell* has to be told once."""
    return _SCRIPTS[shell].strip()
