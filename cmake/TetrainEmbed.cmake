# The Lua library as C source, with the training, generation and export scripts as the tools te.tools.train,
# te.tools.generate and te.tools.export. Run with -P, ROOT being the project's folder and OUTPUT the file to write;
# included, it declares the rules that make ${TE_LUA_SOURCES_C}, packed by pack_sources.c where the build can run
# programs. Lines that are comments become empty, except those that document functions (---), which tools read. Comments
# behind code go as well, and indentation, unless a text of several lines might need it.
if(CMAKE_SCRIPT_MODE_FILE)
  file(GLOB_RECURSE files RELATIVE ${ROOT}/lua ${ROOT}/lua/te/*.lua)
  list(SORT files)
  set(tool_train scripts/train_gpt.lua)
  set(tool_generate scripts/generate.lua)
  set(tool_export scripts/export.lua)
  set(arrays "")
  set(rows "")
  set(n 0)
  foreach(file IN LISTS files ITEMS te/tools/train.lua te/tools/generate.lua te/tools/export.lua)
    set(path lua/${file})
    if(file MATCHES "^te/tools/(train|generate|export)\\.lua$")
      set(path ${tool_${CMAKE_MATCH_1}})
    endif()
    file(READ ${ROOT}/${path} text)
    foreach(every RANGE 1) # second lines in a row
      string(REGEX REPLACE "\n *--( [^\n]*)?\n" "\n\n" text "${text}")
    endforeach()
    string(REGEX REPLACE "([^\n -]) +-- [^\n\"]*\n" "\\1\n" text "${text}") # before a quote it may be in a text
    if(NOT text MATCHES "\\[=*\\[\n")
      string(REGEX REPLACE "\n +" "\n" text "${text}")
    endif()
    string(HEX "${text}" hex)
    string(LENGTH "${hex}" length)
    math(EXPR length "${length} / 2")
    string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
    string(REGEX REPLACE "(/init)?\\.lua$" "" name ${file})
    string(REPLACE "/" "." name ${name})
    string(APPEND arrays "static const unsigned char source_${n}[] = {${bytes}0};\n")
    string(APPEND rows "    {\"${name}\", \"${file}\", source_${n}, ${length}, ${length}},\n")
    math(EXPR n "${n} + 1")
  endforeach()
  file(WRITE ${OUTPUT} "/* Made from lua/te by cmake/TetrainEmbed.cmake. */\n"
    "#include \"lua_bindings/bindings.h\"\n\n${arrays}\n"
    "const te_lua_source te_lua_sources[] = {\n${rows}    {0, 0, 0, 0, 0},\n};\n")
else()
  file(GLOB_RECURSE TE_LUA_FILES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/lua/te/*.lua)
  set(TE_LUA_SOURCES_C ${CMAKE_BINARY_DIR}/lua_sources.c)
  add_custom_command(OUTPUT ${TE_LUA_SOURCES_C}
    COMMAND ${CMAKE_COMMAND} -DROOT=${CMAKE_SOURCE_DIR} -DOUTPUT=${TE_LUA_SOURCES_C} -P ${CMAKE_CURRENT_LIST_FILE}
    DEPENDS ${TE_LUA_FILES} ${CMAKE_SOURCE_DIR}/scripts/train_gpt.lua ${CMAKE_SOURCE_DIR}/scripts/generate.lua
      ${CMAKE_SOURCE_DIR}/scripts/export.lua ${CMAKE_CURRENT_LIST_FILE}
    COMMENT "Embedding the Lua library")
  if(NOT CMAKE_CROSSCOMPILING)
    add_executable(te_pack_sources ${CMAKE_CURRENT_LIST_DIR}/pack_sources.c ${TE_LUA_SOURCES_C}
      ${CMAKE_SOURCE_DIR}/src/lua_bindings/unpack.c)
    target_include_directories(te_pack_sources PRIVATE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src)
    target_link_libraries(te_pack_sources PRIVATE te_flags PkgConfig::LUAJIT)
    set(TE_LUA_SOURCES_C ${CMAKE_BINARY_DIR}/lua_sources_packed.c)
    add_custom_command(OUTPUT ${TE_LUA_SOURCES_C} COMMAND te_pack_sources ${TE_LUA_SOURCES_C}
      DEPENDS te_pack_sources VERBATIM COMMENT "Packing the Lua library")
  endif()
endif()
