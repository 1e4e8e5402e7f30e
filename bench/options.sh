# Options of the shell benches. To be sourced.

# read_options NAMES ARGUMENTS…: --NAME=VALUE sets the variable NAME, which NAMES has; NAME? stands for --NAME, which
# makes it yes. Anything else ends the script.
read_options() {
    names=$1
    shift
    for option in "$@"; do
        name=${option#--}
        name=${name%%=*}
        case $name in "" | *[!a-z]*) name=none ;; esac
        case "$option in $names " in
        --*=*" in "*" $name "* | --*=*" in $name "*) eval "$name=\${option#*=}" ;;
        "--$name in "*" $name? "* | "--$name in $name? "*) eval "$name=yes" ;;
        *) echo "${0##*/}: unknown option $option" >&2; exit 2 ;;
        esac
    done
}
