/* copy.c - a program with the library, and a plugin with a copy of its own: both work, and neither calls the other's
 * functions.    copy LIBRARY */
#include <tetrain/tetrain.h>

#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    tetrain *(*open_copy)(const tetrain_options *) = NULL;
    void (*close_copy)(tetrain *) = NULL;
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library) *(void **)&open_copy = dlsym(library, "tetrain_open");
    if (library) *(void **)&close_copy = dlsym(library, "tetrain_close");
    if (!open_copy || !close_copy || open_copy == tetrain_open) return 2;
    tetrain *first = tetrain_open(NULL), *second = open_copy(NULL);
    if (!first || !second) fprintf(stderr, "copy: %s does not open\n", first ? "the plugin's library" : "the library");
    int good = first && second;
    close_copy(second);
    tetrain_close(first);
    return !good;
}
