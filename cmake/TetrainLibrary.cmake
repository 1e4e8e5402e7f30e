# libtetrain: engine, kernels and bindings as one set of objects, linked statically and shared; and the executable.
include(TetrainEmbed)

file(GLOB TE_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/core/*.c ${CMAKE_SOURCE_DIR}/src/core/ops/*.c
  ${CMAKE_SOURCE_DIR}/src/kernels/*.c ${CMAKE_SOURCE_DIR}/src/kernels/cpu/*.c ${CMAKE_SOURCE_DIR}/src/lua_bindings/*.c)
file(GLOB TE_ISA_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/*.c)

add_library(te_objects OBJECT ${TE_SOURCES} ${TE_LUA_SOURCES_C})
target_include_directories(te_objects PUBLIC ${CMAKE_SOURCE_DIR}/include PRIVATE ${CMAKE_SOURCE_DIR}/src)
target_link_libraries(te_objects PUBLIC te_flags PkgConfig::LUAJIT PkgConfig::JANSSON OpenMP::OpenMP_C Threads::Threads ${CMAKE_DL_LIBS} m)
if(TE_WITH_ONEDNN)
  target_link_libraries(te_objects PUBLIC te_dnnl)
endif()

set(TE_ALL_OBJECTS $<TARGET_OBJECTS:te_objects>)
if(TE_ISA_SOURCES)
  foreach(isa IN LISTS TE_ISAS)
    add_library(te_isa_${isa} OBJECT ${TE_ISA_SOURCES})
    target_include_directories(te_isa_${isa} PRIVATE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src)
    target_compile_definitions(te_isa_${isa} PRIVATE TE_ISA=${isa} TE_ISA_${isa}=1)
    target_compile_options(te_isa_${isa} PRIVATE ${TE_ISA_FLAGS_${isa}})
    target_link_libraries(te_isa_${isa} PRIVATE te_flags OpenMP::OpenMP_C)
    list(APPEND TE_ALL_OBJECTS $<TARGET_OBJECTS:te_isa_${isa}>)
  endforeach()
endif()

add_library(tetrain_static STATIC ${TE_ALL_OBJECTS})
set_target_properties(tetrain_static PROPERTIES OUTPUT_NAME tetrain)
target_link_libraries(tetrain_static PUBLIC te_objects)

# Only what the public headers mark with TE_API is visible.
add_library(tetrain_shared SHARED ${TE_ALL_OBJECTS})
set_target_properties(tetrain_shared PROPERTIES OUTPUT_NAME tetrain VERSION ${PROJECT_VERSION} SOVERSION 0)
target_link_libraries(tetrain_shared PUBLIC te_objects)
add_library(tetrain::tetrain ALIAS tetrain_shared)

file(GLOB TE_EXECUTABLE_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/tetrain/*.c)
add_executable(tetrain_executable ${TE_EXECUTABLE_SOURCES})
set_target_properties(tetrain_executable PROPERTIES OUTPUT_NAME tetrain)
target_link_libraries(tetrain_executable PRIVATE tetrain_static)

include(GNUInstallDirs)
install(TARGETS tetrain_executable tetrain_shared tetrain_static)
install(DIRECTORY include/tetrain TYPE INCLUDE)
install(DIRECTORY scripts TYPE DATA FILES_MATCHING PATTERN "*.lua")
