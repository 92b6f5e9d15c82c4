#!/usr/bin/env bash
# A producer in plain bash: no client, no redis-cli, only a socket. Usage:
#   gewell.sh enqueue ID PROMPT [MAX_TOKENS]   add a job
#   gewell.sh follow ID                        stream its answer, whatever is lost on the way
#   gewell.sh result ID                        print its final record (JSON)
# GEWELL_HOST, GEWELL_PORT, GEWELL_NAMESPACE say where. Needs bash 4.4 or later.
set -uo pipefail
export LC_ALL=C # lengths in the protocol are bytes
host=${GEWELL_HOST:-127.0.0.1} port=${GEWELL_PORT:-6379} ns=${GEWELL_NAMESPACE:-gewell}
readonly SILENCE_S=1

# --- the Redis protocol -----------------------------------------------------------------------------------------------

connect() { # fd
    eval "exec $1<>/dev/tcp/$host/$port" 2>/dev/null
}

send() { # fd word...
    local fd=$1 word request
    shift
    request="*$#"$'\r\n'
    for word in "$@"; do request+="\$${#word}"$'\r\n'"$word"$'\r\n'; done
    printf %s "$request" >&"$fd"
}

# Read one reply into the array `reply`, nested arrays flattened. Fails when the link is lost, or after `wait` seconds.
receive() { # fd [wait]
    reply=()
    _receive "$1" "${2:-30}"
}

_receive() {
    local head body count i
    IFS= read -r -t "$2" -u "$1" head || return 1
    head=${head%$'\r'}
    case $head in
        '$-1' | '*-1' | _) reply+=('') ;;
        '$'*)
            count=$((${head#?} + 2)) # with the line end
            IFS= read -r -t 30 -N "$count" -u "$1" body || return 1
            reply+=("${body%$'\r\n'}")
            ;;
        '*'*) for ((i = 0; i < ${head#?}; i++)); do _receive "$1" 30 || return 1; done ;;
        -*) printf 'server: %s\n' "${head#?}" >&2 && return 2 ;;
        *) reply+=("${head#?}") ;;
    esac
}

ask() { # word...   one command on a connection of its own
    connect 3 || { printf 'no server at %s:%s\n' "$host" "$port" >&2 && return 1; }
    send 3 "$@" && receive 3
    local status=$?
    exec 3>&-
    return $status
}

# --- the two bits of JSON that we need --------------------------------------------------------------------------------

quote() { # text -> JSON string
    local text=$1
    text=${text//\\/\\\\} text=${text//\"/\\\"} text=${text//$'\n'/\\n} text=${text//$'\r'/\\r} text=${text//$'\t'/\\t}
    printf '"%s"' "$text"
}

text_of() { # chunk -> its text, in `text`; reasoning and tools are not shown
    text=''
    [[ $1 =~ \"ch\":\"content\" ]] || return 0
    if [[ $1 =~ \"t\":\"(([^\"\\]|\\.)*)\" ]]; then
        text=${BASH_REMATCH[1]//\\\\/$'\1'} # \\ aside, so that the next line sees only real escapes
        text=${text//\\\"/\"}
        printf -v text %b "${text//$'\1'/\\\\}" # \n, \t, \u001b
    fi
}

# --- following --------------------------------------------------------------------------------------------------------
# last      id of the newest entry taken, "" before the first
# at        bytes of text before the next chunk; less than `shown` while a new epoch repeats what was shown
# shown     bytes printed
# state     how the job ended, "" while it has not

take() { # entry-id field value
    last=$1
    case $2 in
        d)
            text_of "$3"
            local end=$((at + ${#text}))
            ((end > shown)) && printf %s "${text:shown > at ? shown - at : 0}" && shown=$end
            at=$end
            ;;
        restart) [[ $3 == *'"keep":0}'* ]] && at=0 ;; # the stream was lost and is written again
        end) [[ $3 =~ \"state\":\"([a-z]+)\" ]] && state=${BASH_REMATCH[1]} ;;
    esac
}

read_range() { # (2) everything behind `last`, from the stream itself
    local i
    send 3 XRANGE "$ns:out:$id" "${last:--}" + && receive 3 || return 1
    if [[ -n $last && ${reply[0]-} != "$last" ]]; then # not the stream that was read so far: from its beginning
        last='' at=0
        send 3 XRANGE "$ns:out:$id" - + && receive 3 || return 1
    fi
    for ((i = 0; i + 2 < ${#reply[@]}; i += 3)); do # id, field, value
        [[ ${reply[i]} != "$last" ]] && take "${reply[@]:i:3}"
    done
    [[ -n $state || ${#reply[@]} -gt 1 ]] && return 0
    send 3 GET "$ns:res:$id" && receive 3 || return 1 # (6) no stream: the record may stand
    if [[ -n ${reply[0]} ]]; then
        at=0
        [[ ${reply[0]} =~ \"text\":\"(([^\"\\]|\\.)*)\" ]] && take x d "{\"t\":\"${BASH_REMATCH[1]}\",\"ch\":\"content\"}"
        take x end "${reply[0]}"
    fi
}

is_next() { # entry-id
    [[ ${1%-*} == "${last%-*}" && ${1#*-} -eq $((${last#*-} + 1)) ]]
}

is_old() {
    [[ -n $last ]] && ((${1%-*} < ${last%-*} || (${1%-*} == ${last%-*} && ${1#*-} <= ${last#*-})))
}

listen() { # until the end (0) or a lost link (1)
    connect 3 && connect 4 || return 1
    send 4 SUBSCRIBE "$ns:ev:$id" && receive 4 || return 1 # (1) confirmed: what comes now is announced
    read_range || return 1
    while [[ -z $state ]]; do
        if ! receive 4 $SILENCE_S; then
            send 4 PING && receive 4 5 || return 1 # silence (4), or is the link gone (5)?
            [[ ${reply[0]} == message ]] || { read_range || return 1; continue; }
        fi
        [[ ${reply[0]} == message ]] || continue
        local entry=${reply[2]%% *} payload=${reply[2]#* } field=d
        [[ $payload == *'"state":'* && $payload == *'"finish_reason":'* ]] && field=end
        if is_old "$entry"; then
            continue
        elif [[ -n $last ]] && is_next "$entry"; then
            take "$entry" $field "$payload" # (3)
        else
            read_range || return 1 # a gap, or another epoch
        fi
    done
}

follow() {
    id=$1 last='' at=0 shown=0 state=''
    until listen; do # (5) a lost link: from the top
        exec 3>&- 4>&-
        sleep 0.2
    done 2>/dev/null
    printf '\n'
    [[ $state == done ]] || { printf 'ended as %s\n' "$state" >&2 && return 1; }
}

case ${1-} in
    enqueue)
        body="{\"kind\":\"completion\",\"request\":{\"prompt\":$(quote "$3"),\"max_tokens\":${4:-64}}}"
        ask XADD "$ns:jobs:normal" '*' v 1 id "$2" body "$body" && printf '%s\n' "${reply[0]}"
        ;;
    follow) follow "$2" ;;
    result) ask GET "$ns:res:$2" && [[ -n ${reply[0]} ]] && printf '%s\n' "${reply[0]}" ;;
    *) sed -n '2,6s/^# //p' "$0" >&2 && exit 2 ;;
esac
